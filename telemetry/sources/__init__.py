"""The sources that the agent polls, one file for each."""
