"""Does a change of the algorithm make a model learn better at equal cost?

`study learning STUDY` trains every variant of a study (ops/recipes/studies) under every seed, one run after another,
and compares the variants on held-out tasks, two at a time in the contrasts that the study names.

    study       the study file, its variants and its runs
    run         trains the runs as child processes; the directory remembers which have finished
    outcome     reads a finished run: its success curve and its cost
    statistics  bootstrap intervals over seeds, tasks and episodes
    significance  t, Holm and Fisher
    contrasts   two variants, seed by seed: at the end, at equal cost, and the cost of equal success
    comparison  intervals of each variant, `results.json`
    report      `results.json` as Markdown: `report.md`, and the pages of docs/studies
    plots       the success curves
    timeline    where the time of a finished run went

How to read `report.md`: `start` and `end` are success before the first and after the last RL step, with 95 % intervals
in parentheses. With one seed they cover the played episodes only. An ESS far below 1 says that the actors' policy and
the trained one have drifted apart. Contrasts are shown at the end and at the largest cost that every run reached;
`results.json` also has the cost of equal success for every axis, and the p of collapses.
"""
