"""LoRA adapters beside the served model."""
