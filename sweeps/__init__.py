"""How many trials run: a study's plan, its launch and its status."""
