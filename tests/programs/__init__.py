"""Small programs with the loops of real ones. Each says itself what is true of its run, and the report must say the same."""
