"""Modules for the slots of a layer spec."""
