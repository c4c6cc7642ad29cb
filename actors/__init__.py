"""An actor: leases tickets, plays episodes token-exactly, follows the weights, publishes groups."""
