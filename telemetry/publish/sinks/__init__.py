"""Write the figures of a run into the loggers that the user has: one file for each library."""
