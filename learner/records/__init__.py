"""What a run leaves behind: checkpoints, journal, ledger, evaluations, the best version; and its replay."""
