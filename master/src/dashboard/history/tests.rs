use std::time::Duration;

use elasticdl_proto::{Cause, Generation};

use super::*;
use crate::job::testing::spec;
use crate::job::{Job, StepTimes, Time};

/// A snapshot of a job that runs.
fn snapshot(at_s: f64, step: u64) -> Snapshot {
    let mut snapshot = Job::new(spec()).snapshot(Time(Duration::from_secs_f64(at_s)));
    snapshot.status.state = "running".into();
    snapshot.status.step = step;
    snapshot.status.events.clear();
    snapshot.status.events_emitted = 0;
    snapshot
}

fn change(generation: u64, lost: Vec<WorkerId>) -> MembershipChange {
    MembershipChange {
        generation: Generation(generation),
        cause: Cause::Lost,
        world_size: 2,
        at_step: 9,
        lost,
        ..MembershipChange::default()
    }
}

fn evaluated(step: u64) -> Option<Evaluated> {
    Some(Evaluated { step, records: 10, metrics: [("loss".into(), Some(step as f64))].into() })
}

#[test]
fn a_change_has_the_time_of_its_publication_and_the_pause_that_is_reported_later() {
    let mut history = History::default();
    let mut seen = snapshot(1.0, 1);
    seen.status.memberships = vec![change(1, Vec::new())];
    history.observe(&seen);
    seen.at = Time(Duration::from_secs(2));
    seen.status.memberships.push(change(2, vec![WorkerId(1)]));
    history.observe(&seen);
    seen.at = Time(Duration::from_secs(3));
    let paused = MembershipChange { gap_ms: Some(4.0), ..change(2, vec![WorkerId(1)]) };
    // The status has the newest changes only.
    seen.status.memberships = vec![paused.clone()];
    history.observe(&seen);
    let expected = [
        MembershipAt { at_s: Some(1.0), change: change(1, Vec::new()) },
        MembershipAt { at_s: Some(2.0), change: paused },
    ];
    assert_eq!(history.memberships, expected);
}

#[test]
fn each_event_is_listed_once_with_its_time() {
    let mut history = History::default();
    let mut seen = snapshot(1.0, 1);
    for (at_s, lines, emitted) in [(1, vec!["a", "b"], 2), (2, vec!["b", "c"], 3)] {
        seen.at = Time(Duration::from_secs(at_s));
        seen.status.events = lines.into_iter().map(str::to_owned).collect();
        seen.status.events_emitted = emitted;
        history.observe(&seen);
        history.observe(&seen);
    }
    let lines: Vec<_> = history.events.iter().map(|e| (e.at_s, e.text.as_str())).collect();
    assert_eq!(lines, [(1.0, "a"), (1.0, "b"), (2.0, "c")]);
    // The next master counts its lines from 0.
    let mut history = history.resumed();
    seen.status.events = vec!["d".into()];
    seen.status.events_emitted = 1;
    history.observe(&seen);
    assert_eq!(history.events.back().unwrap().text, "d");
}

#[test]
fn a_history_is_bounded_and_keeps_what_is_new() {
    let mut history = History::default();
    let mut table = BTreeMap::new();
    for number in 1..=3000_u64 {
        let mut seen = snapshot(number as f64, number);
        seen.status.memberships = vec![change(number, (0..100).map(WorkerId).collect())];
        seen.status.evaluated = evaluated(number);
        seen.status.events = vec![format!("event {number}")];
        seen.status.events_emitted = number;
        if number % 100 == 0 {
            let ended_s = (number > 100).then_some(number as f64);
            table.extend(
                (number - 99..=number).map(|id| {
                    (WorkerId(id), WorkerLifetime { ended_s, ..WorkerLifetime::default() })
                }),
            );
            seen.lifetimes = Arc::new(table.clone());
        }
        history.observe(&seen);
    }
    assert_eq!(history.events.len(), EVENTS_MAX);
    assert_eq!(history.events.back().unwrap().text, "event 3000");
    assert_eq!(history.memberships.len(), NAMED_MAX / 100);
    assert_eq!(history.memberships.back().unwrap().change.generation, Generation(3000));
    assert!(history.evaluations.len() <= EVALUATIONS_MAX && history.evaluations.len() > 100);
    let steps: Vec<u64> = history.evaluations.iter().map(|e| e.evaluated.step).collect();
    assert_eq!((steps[0], *steps.last().unwrap()), (1, 3000), "{steps:?}");
    assert!(steps.is_sorted_by(|a, b| a < b));
    assert_eq!(history.workers.len(), LIFETIMES_MAX);
    let alive = history.workers.values().filter(|lifetime| lifetime.ended_s.is_none()).count();
    assert_eq!(alive, 100, "workers that live are kept");
    let json = serde_json::to_string(&history).unwrap();
    assert!(json.len() < 1 << 20, "{}", json.len());
    let read: History = serde_json::from_str(&json).unwrap();
    assert_eq!((read.curves, read.workers), (history.curves, history.workers));
}

#[test]
fn the_lifetime_of_a_worker_spans_masters() {
    let mut history = History::default();
    let lifetime = WorkerLifetime { launched_s: 1.0, ..WorkerLifetime::default() };
    let mut seen = snapshot(2.0, 1);
    seen.lifetimes = Arc::new([(WorkerId(1), lifetime.clone())].into());
    history.observe(&seen);
    let stored = serde_json::to_string(&history).unwrap();
    let mut history = serde_json::from_str::<History>(&stored).unwrap().resumed();
    let later = WorkerLifetime { launched_s: 5.0, ended_s: Some(6.0), ..lifetime };
    seen.lifetimes = Arc::new([(WorkerId(1), later)].into());
    history.observe(&seen);
    let known = &history.workers[&WorkerId(1)];
    assert_eq!((known.launched_s, known.ended_s), (1.0, Some(6.0)));
}

#[test]
fn goodput_is_the_part_of_the_time_that_went_into_steps_that_were_kept() {
    let mut history = History::default();
    let mut observe = |at_s: f64, steps: u64, lost_steps: u64, state: &'static str| {
        let mut seen = snapshot(at_s, steps);
        seen.status.state = state.into();
        seen.counters.times = StepTimes { steps, step_us: steps * 1_000_000, reduce_us: 0 };
        let restored =
            elasticdl_proto::RestoredCheckpoint { step: 1, name: "n".into(), lost_steps };
        seen.status.checkpoints = Some(elasticdl_proto::CheckpointsSummary {
            restored: vec![restored],
            ..Default::default()
        });
        history.observe(&seen);
        history.goodput.value
    };
    assert_eq!(observe(1.0, 0, 0, "starting"), None);
    // Before its first timed step the job had no group.
    assert_eq!(observe(12.0, 2, 0, "running"), Some(1.0));
    assert_eq!(observe(20.0, 10, 0, "running"), Some(1.0));
    // Ten seconds without a group.
    assert_eq!(observe(30.0, 10, 0, "waiting"), Some(0.5));
    // Half of the steps were made again.
    assert_eq!(observe(30.0, 10, 5, "waiting"), Some(0.25));
    // The time after the end does not count.
    assert_eq!(observe(99.0, 10, 5, "completed"), Some(0.25));
}
