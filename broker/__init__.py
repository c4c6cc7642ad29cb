"""Everything that travels: tickets, groups, weights and state over one transport seam. PROTOCOL.md is its contract."""
