"""What people and platforms use: the command line, local runs, status, report, benches, recipes, deployment."""
