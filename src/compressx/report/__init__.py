"""What a run tells: its report, figures, and how they are written."""
