"""Using a run: its saved model, samples and predictions, and scores on other text."""
