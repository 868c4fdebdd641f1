"""The arithmetic of merging: flat layout, compression, ring schedules, exact accumulation. numpy only, no I/O."""
