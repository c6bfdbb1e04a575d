"""Models on disk: one safetensors file per layer, and the conversion from and to Hugging Face checkpoints."""
