"""What a run starts from: the model and its weights, the text and its batches."""
