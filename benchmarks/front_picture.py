"""Draw what a token costs by kind of stream, and what one process delivers, from `front-path` and `front-costless`.

python benchmarks/front_picture.py       # writes docs/figures/front_path.png
"""

from tables import ROOT, load

FIGURE = ROOT / "docs" / "figures" / "front_path.png"
OURS, THEIRS = "#4477aa", "#bbbbbb"
COLOURS = {"melld": OURS, "melld, events by vLLM": "#66ccee", "vLLM": THEIRS}


def main() -> None:
    """Draw."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3, gridspec_kw={"width_ratios": [3, 3, 2]})
    rows = load("front-path")["rows"][::-1]
    for plot, (ours, theirs), what in ((left, (2, 3), "token"), (middle, (5, 6), "event")):
        for column, colour, name, shift in ((ours, OURS, "melld", 0.2), (theirs, THEIRS, "vLLM", -0.2)):
            costs = [float(row[column]) for row in rows]
            places = [place + shift for place in range(len(rows))]
            plot.barh(places, costs, height=0.38, color=colour, label=name)
        plot.set_yticks(range(len(rows)), [row[0] for row in rows], fontsize=8)
        plot.set_title(f"processor time of the front per {what}, µs", fontsize=9)
        plot.tick_params(labelsize=8)
    middle.set_xscale("log")
    left.legend(fontsize=8)
    rates = load("front-costless")["rows"]
    settings = list(dict.fromkeys(row[0] for row in rows_of(rates)))
    for number, (way, colour) in enumerate(COLOURS.items()):
        chosen = [float(row[2].replace(",", "")) for row in rows_of(rates) if row[1] == way]
        right.bar([place + 0.26 * (number - 1) for place in range(len(chosen))], chosen, 0.24, color=colour, label=way)
    right.set_xticks(range(len(settings)), [f"{setting} streams" for setting in settings])
    right.set_title("tokens/s of one process, costless engines", fontsize=9)
    right.tick_params(labelsize=8)
    right.legend(fontsize=7)
    figure.savefig(FIGURE, dpi=90, metadata={"Software": None})
    print(FIGURE)


def rows_of(rates: list[list[str]]) -> list[list[str]]:
    """Return the rows by streams, in the order of the fronts."""
    return sorted(rates, key=lambda row: (int(row[0].split()[-1]), list(COLOURS).index(row[1])))


if __name__ == "__main__":
    main()
