"""Models: layer specs, dropout sites, initial weights, construction."""
