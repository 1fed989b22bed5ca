"""Rows that data selects (`x[mask]`, `torch.where(mask)`), traced as all rows with a mask that counts at the end."""
