"""The lines of the log: their records, the files that have them, and who reads them."""
