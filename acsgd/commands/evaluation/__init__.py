"""`acsgd eval`: evaluate a model by its loss, by metrics, by the answers it generates, or with lm-eval."""
