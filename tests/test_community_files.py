"""Files for contributors: forms, citation, hooks, continuous integration."""

import re
from importlib.metadata import metadata
from pathlib import Path

import pytest
import yaml

from ls_edge.version import __version__
from tests.linters import lint

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
SCHEMAS = {
    **{path: "vendor.github-issue-forms" for path in GITHUB.glob("ISSUE_TEMPLATE/*.yml") if path.name != "config.yml"},
    GITHUB / "ISSUE_TEMPLATE" / "config.yml": "vendor.github-issue-config",
    GITHUB / "dependabot.yml": "vendor.dependabot",
    ROOT / "CITATION.cff": "vendor.citation-file-format",
}
WORKFLOWS = sorted(GITHUB.glob("workflows/*.yml"))
RULES = "{line-length: {max: 160}, document-start: disable, truthy: {check-keys: false}}"


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.name)
def test_files_follow_their_schema(path):
    lint("check-jsonschema", "--builtin-schema", SCHEMAS[path], path)


def test_the_citation_is_of_this_package():
    cited, package = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8")), metadata("ls-edge")
    assert (cited["title"], cited["version"]) == (package["Name"], __version__)
    assert (cited["abstract"], cited["license"]) == (package["Summary"], package["License-Expression"])


def test_local_hooks_follow_their_schema():
    lint("pre-commit", "validate-config", ROOT / ".pre-commit-config.yaml")


def test_workflows_follow_their_schema():
    assert [path.stem for path in WORKFLOWS] == ["images", "release", "site", "tests"]
    for schema in ("vendor.github-workflows", "custom.github-workflows-require-timeout"):
        lint("check-jsonschema", "--builtin-schema", schema, *WORKFLOWS)
    lint("yamllint", "-s", "-d", f"{{extends: default, rules: {RULES}}}", GITHUB, ROOT / "mkdocs.yml")


def test_workflows_pass_actionlint():
    lint("actionlint", *WORKFLOWS)


def test_workflows_name_existing_targets_and_pythons():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for path in WORKFLOWS:
        text = path.read_text(encoding="utf-8")
        assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets
        assert all(f"Python :: {one}" in project for one in re.findall(r'"(3\.\d+)"', text))
        assert re.search(r"^permissions:\n  contents: read$", text, re.M)
