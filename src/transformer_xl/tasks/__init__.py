"""Fine-tuned models: what they say of texts, how right that is, and the settings of the tasks that ship with the package."""
