"""Where a run's metrics go besides its own files: one small class for each place, and what keeps them from hurting training."""
