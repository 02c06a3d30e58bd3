"""The page of hardware shows what the links of several GPUs were measured to reach."""

import hardware_results


def link(d2h, h2d, duplex):
    rates = (("d2h", d2h), ("h2d", h2d), ("duplex", duplex))
    return {f"{name}_bytes_per_s": rate * 1e9 for name, rate in rates}


def test_links_are_shown_alone_and_all_at_once():
    gpus = [{"alone": link(50, 51, 90), "all at once": link(rate, 40, 41)} for rate in (30, 34, 70)]
    record = {"date": "2026-01-02T03:04:05+00:00", "hardware": {"gpu": "A GPU"}, "links": gpus}
    lines = hardware_results.links_table([record]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| 3")]
    assert cells == [
        ["3 × A GPU, one copies", "50", "51", "90"],
        ["3 × A GPU, all copy", "34", "40", "41"],
    ]
    assert lines[-1] == "Medians over the GPUs; 2026-01-02."


def test_the_page_s_links_are_those_that_were_measured():
    page = (hardware_results.ROOT / "docs" / "explanation" / "hardware.md").read_text("utf-8")
    table = hardware_results.links_table(hardware_results.read_records())
    assert table in page
    *_, four = [line for line in table.splitlines() if line.startswith("| 4")]
    assert [cell.strip() for cell in four.strip("|").split("|")[1:]] == ["34", "40", "39"]
    assert "Link(34e9, 39.7e9, 39e9)" in page
