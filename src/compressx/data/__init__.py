"""Calibration, training and evaluation text: where documents come from and how they are cut into windows."""
