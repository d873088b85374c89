"""Scripts after public reports of people who train, and others of the same kinds. The agent's whole report is judged."""
