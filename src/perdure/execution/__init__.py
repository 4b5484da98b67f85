"""Running a config: the loop, its run directory, its trackers and its report."""
