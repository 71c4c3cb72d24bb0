"""What a layout costs: memory of a rank and its messages, computed."""
