"""Text from a trained model: one prompt, a file of prompts, or a chat."""
