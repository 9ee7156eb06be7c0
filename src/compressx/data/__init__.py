"""Calibration, training and evaluation text: documents, and windows of their tokens."""
