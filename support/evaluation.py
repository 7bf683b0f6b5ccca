"""The numbers of an evaluation: shares with their intervals, and the paired test of two evaluations.

A record is one answered question: a row of an eval-NAME.json file.
"""

import math


def is_right(record, lenient=False):
    """Whether a record's answer is right, as the task judged it; files of older runs hold the two letters only."""
    right, choice = ("lenient_right", "lenient_choice") if lenient else ("right", "choice")
    return record[choice] == record["gold"] if record.get(right) is None else record[right]


def rate(count, n):
    """A share with its 95 % Wilson score interval (Wilson 1927); value and interval are None where n is 0."""
    if n == 0:
        return {"value": None, "count": count, "n": n, "low": None, "high": None}
    z, p = 1.959963984540054, count / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return {"value": p, "count": count, "n": n, "low": middle - half if count else 0.0,  # exact where rounding is not
            "high": middle + half if count < n else 1.0}


def summarize(records):
    """The records of one evaluation -> its accuracy, format rate and so on."""
    n = len(records)
    formatted = [record for record in records if record["choice"] is not None]
    return {
        "accuracy": rate(sum(map(is_right, records)), n), "format_rate": rate(len(formatted), n),
        "accuracy_given_format": rate(sum(map(is_right, formatted)), len(formatted)),
        "lenient_accuracy": rate(sum(is_right(record, lenient=True) for record in records), n),
        "truncated_rate": rate(sum(record["truncated"] for record in records), n),
        "mean_tokens": sum(record["tokens"] for record in records) / n}


def mcnemar(before, after):
    """Exact two-sided McNemar test: how likely so uneven a split of the questions that changed would be by chance."""
    pairs = [(is_right(b), is_right(a)) for b, a in zip(before, after, strict=True)]
    gained, lost = pairs.count((False, True)), pairs.count((True, False))
    changed = gained + lost
    tail = sum(math.comb(changed, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**changed)


def compare(before, after):
    """The records of two evaluations of the same questions (or None) -> what `results.json` holds."""
    return {"before": summarize(before) if before else None, "after": summarize(after) if after else None,
            "mcnemar_p": mcnemar(before, after) if before and after else None}


def results_table(results):
    """The before/after table as text."""
    columns = [name for name in ("before", "after") if results[name]]
    lines = [f"{'':22}" + "".join(f"{name:>24}" for name in columns)]
    for key in results[columns[0]]:
        cells = []
        for name in columns:
            value = results[name][key]
            if key == "mean_tokens":
                cells.append(f"{value:.1f}")
            elif value["value"] is None:
                cells.append("-")
            else:
                cells.append(f"{value['value']:.1%} ({value['low']:.1%}-{value['high']:.1%})")
        lines.append(f"{key.replace('_', ' '):22}" + "".join(f"{cell:>24}" for cell in cells))
    lines.append(f"n = {results[columns[0]]['accuracy']['n']}, 95 % Wilson intervals")
    if results["mcnemar_p"] is not None:
        lines[-1] += f"; the gain's exact McNemar p = {results['mcnemar_p']:.2g}"
    return "\n".join(lines)
