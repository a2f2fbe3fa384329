"""PDDL plans, judged by unified-planning: its reader, and its validator of plans."""

from __future__ import annotations

import itertools

import pytest
from languages import is_member, random_members
from unified_planning.engines import SequentialPlanValidator, ValidationResultStatus
from unified_planning.exceptions import UPException
from unified_planning.io import PDDLReader

from guided_smc.grammars import library

DOMAIN = """
(define (domain house) (:requirements :strips :typing :negative-preconditions)
  (:types ball room - object small-ball - ball)
  (:predicates (in ?r - room) (at ?b - ball ?r - room) (held ?b - ball) (rested))
  (:action move :parameters (?from ?to - room) :precondition (in ?from)
    :effect (and (not (in ?from)) (in ?to)))
  (:action pick-up :parameters (?b - ball ?r - room)
    :precondition (and (in ?r) (at ?b ?r)) :effect (and (held ?b) (not (at ?b ?r))))
  (:action hide_it :parameters (?b - small-ball) :precondition (held ?b) :effect (not (held ?b)))
  (:action wait :parameters () :precondition (not (rested)) :effect (rested)))
"""
PROBLEM = """
(define (problem tidy) (:domain house)
  (:objects b1 - ball b-2 - small-ball kitchen hall_1 - room)
  (:init (in kitchen) (at b1 kitchen) (at b-2 hall_1)) (:goal (held b-2)))
"""


READER = PDDLReader()


@pytest.fixture(scope="module")
def problem():
    return READER.parse_problem_string(DOMAIN, PROBLEM)


@pytest.fixture(scope="module")
def plans(problem):
    """The grammar of the domain, by what the judge has read of it."""
    actions = {a.name: [p.type.name for p in a.parameters] for a in problem.actions}
    objects = {t.name: [o.name for o in problem.objects(t)] for t in problem.user_types}
    return library.pddl_plan(actions, objects)


def read(problem, text):
    """The plan as the judge reads it; None if it refuses the text."""
    try:
        return READER.parse_plan_string(problem, text)
    except (UPException, AssertionError):  # a wrong number of arguments is an assertion
        return None


def test_a_step_is_a_member_exactly_if_the_judge_reads_it(problem, plans):
    names = [action.name for action in problem.actions]
    objects = [thing.name for thing in problem.all_objects]
    members = 0
    assert read(problem, "(move kitchen hall_1 kitchen)") is None
    assert not is_member(plans, "(move kitchen hall_1 kitchen)")
    for name in [*names, "fly"]:
        for n in range(3):
            for arguments in itertools.product(objects, repeat=n):
                text = f"({' '.join([name, *arguments])})"
                assert is_member(plans, text) == (read(problem, text) is not None), text
                members += is_member(plans, text)
    assert members == 2 * 2 + 2 * 2 + 1 + 1


def test_the_judge_reads_every_plan_with_the_values_that_we_do(problem, plans):
    found = random_members(plans, 0, 60, "(move |(pick-up |kitchen|hall_1)|(wait)|\n")
    assert len(found) > 50 and any(text.count("\n") > 2 for text in found)
    for text in found:
        steps = [
            (step.action.name, *(str(argument) for argument in step.actual_parameters))
            for step in read(problem, text).actions
        ]
        assert plans.parse(text) == steps


def test_what_an_action_needs_is_not_checked_as_the_documentation_says(problem, plans):
    judge = SequentialPlanValidator()
    said = {
        "(move kitchen hall_1)\n(pick-up b-2 hall_1)\n": ValidationResultStatus.VALID,
        "(pick-up b-2 hall_1)": ValidationResultStatus.INVALID,
        "(wait)\n(wait)": ValidationResultStatus.INVALID,
    }
    for text, status in said.items():
        assert is_member(plans, text)
        assert judge.validate(problem, read(problem, text)).status == status
