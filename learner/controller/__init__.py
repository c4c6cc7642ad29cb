"""The controller: which ticket is issued next, and under which horizon."""
