"""Models as numbers: by name, or from a config.json of Hugging Face."""
