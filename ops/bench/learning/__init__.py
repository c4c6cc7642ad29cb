"""Studies: variants of a recipe, each trained under the same seeds, compared with intervals."""
