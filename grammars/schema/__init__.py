"""JSON Schema: what it says, the mask that llguidance makes of it, and the check of the rest."""
