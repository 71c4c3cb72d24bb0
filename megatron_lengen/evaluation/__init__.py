"""Measuring models: loss by position, needle recall, reports that compare models."""
