"""Communication hooks for any DistributedDataParallel model."""

from acsgd.dp.hooks.hooks import CocktailState, HookState, MeanState, cocktail_hook, mean_hook

__all__ = ["CocktailState", "HookState", "MeanState", "cocktail_hook", "mean_hook"]
