"""TextCraft: crafting by Minecraft's recipes, with an expert that solves every task."""
