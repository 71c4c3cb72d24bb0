"""Text from a trained model, without an export."""
