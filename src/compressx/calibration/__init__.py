"""Text for calibration and evaluation."""
