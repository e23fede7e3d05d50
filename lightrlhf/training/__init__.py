"""Training: the run, its ranks and their watchdog, iterations, profiles."""
