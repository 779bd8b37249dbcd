//! Events of one kind in one job, and their cost for the workers that they do not hit.

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use elasticdl_proto::{Cause, MembershipChange};
use elasticdl_tests::quantile;
use rustix::process::Signal;

use crate::bench::{Bench, Ended};
use crate::event_log::{EventLog, now};
use crate::{Arguments, Kind};

/// The cost of the events of one kind. A gap is the time between two commits of one worker, for the
/// worker that waited longest, less the median step. All times are in milliseconds.
#[derive(Debug, Default)]
pub(crate) struct Measured {
    pub(crate) median_step: f64,
    /// For each event, the gap of the survivors; for a join, the time from the joiner's start until
    /// it contributes.
    pub(crate) gaps: Vec<f64>,
    /// The longest gap in an equally long time just before each event: the effect of the machine's
    /// other work.
    pub(crate) quiet: Vec<f64>,
    /// The gap when the replacement joins the group; for a join, the gap of the regroup alone.
    pub(crate) switches: Vec<f64>,
    /// Time from each joiner's start until a step with its own records was committed.
    pub(crate) latencies: Vec<f64>,
    pub(crate) steps_lost: usize,
    pub(crate) records_lost: u64,
    pub(crate) records_repeated: u64,
    /// Parts of the gaps of the events and of the joiners' regroups, as the workers reported them
    /// to the master.
    pub(crate) phases: Phases,
    pub(crate) switch_phases: Phases,
}

/// Parts of gaps, over all events: one list for each of [`PHASES`].
pub(crate) type Phases = [Vec<f64>; PHASES.len()];

/// Names of the parts in the summary, without `_ms`.
pub(crate) const PHASES: [&str; 5] = ["detect", "agree", "connect", "state", "first_step"];

struct Event {
    at: Duration,
    /// Time at which all members that the job wants contribute again.
    until: Duration,
    victim: Option<u32>,
}

/// Starts a job in `folder` and disturbs it as often as the arguments say, each time when it is
/// complete and at rest.
pub(crate) fn disturb(
    arguments: &Arguments,
    kind: Kind,
    folder: &Path,
) -> Result<Measured, Box<dyn Error>> {
    let mut bench = Bench::start(arguments, folder)?;
    let mut events = Vec::new();
    for _ in 0..arguments.events {
        events.push(cause(&mut bench, kind)?);
        if kind == Kind::Join {
            bench.scale(0);
        }
        bench.settle()?;
    }
    let ended = bench.stop()?;
    let (records_lost, records_repeated) = ended.records_lost_and_repeated()?;
    // What a process that was killed or stopped had computed is its own loss, not a survivor's.
    let disturbed: Vec<u32> = match kind {
        Kind::Kill | Kind::Stop => events.iter().filter_map(|event| event.victim).collect(),
        Kind::All | Kind::Join | Kind::Leave => Vec::new(),
    };
    let steps_lost = ended.steps_lost(&disturbed);
    let median_step = median_step(&ended, &events);
    let mut measured =
        Measured { median_step, steps_lost, records_lost, records_repeated, ..Measured::default() };
    let mut before = Duration::ZERO;
    for event in &events {
        measured.take(kind, &ended, event, before)?;
        before = event.until;
    }
    Ok(measured)
}

/// Causes one event and waits until the group is complete again.
fn cause(bench: &mut Bench, kind: Kind) -> Result<Event, Box<dyn Error>> {
    let at = now();
    let signal = match kind {
        Kind::All | Kind::Join => None,
        Kind::Kill => Some(Signal::KILL),
        Kind::Leave => Some(Signal::TERM),
        Kind::Stop => Some(Signal::STOP),
    };
    let victim = match signal {
        Some(signal) => {
            let victim = bench.disturb(signal)?;
            bench.wait_gone(victim)?;
            bench.wait_joiner(at)?;
            bench.wait_whole()?;
            Some(victim)
        }
        None => {
            bench.scale(1);
            bench.wait_joiner(at)?;
            None
        }
    };
    let joiners = bench.logs.all.values().filter(|log| log.is_new(at));
    let until = joiners.filter_map(EventLog::contribution).map(|(at, _)| at).max().unwrap_or(at);
    Ok(Event { at, until, victim })
}

impl Measured {
    fn take(
        &mut self,
        kind: Kind,
        ended: &Ended,
        event: &Event,
        before: Duration,
    ) -> Result<(), Box<dyn Error>> {
        let survivors: Vec<&EventLog> = survivors(ended, event).collect();
        let first = survivors.first().ok_or("an event without survivors")?;
        let joiners = ended.logs.all.values().filter_map(|log| {
            let (at, commit) = log.contribution()?;
            (event.at < at && at <= event.until).then_some((log.born, at, commit.step))
        });
        let joiners: Vec<(Duration, Duration, u64)> = joiners.collect();
        self.latencies.extend(joiners.iter().map(|(born, at, _)| ms(*at - *born)));
        let joined_by =
            joiners.iter().map(|(.., step)| *step).max().ok_or("an event without a joiner")?;
        // The generations that the event led to, each with its first step.
        let steps = first.steps_before(event.at)..=joined_by;
        let records: Vec<(u64, &MembershipChange)> = ended
            .summary
            .memberships
            .iter()
            .filter(|record| record.cause != Cause::Start && steps.contains(&record.at_step))
            .map(|record| (record.at_step, record))
            .collect();
        let is_join = |record: &MembershipChange| record.cause == Cause::Join;
        let last = |join: bool| records.iter().rfind(|(_, record)| is_join(record) == join);
        let switch = last(true);
        let (from, to) = match kind {
            // The whole time that the survivors notice the joiner, its start and preparation
            // included.
            Kind::All | Kind::Join => {
                (joiners.iter().map(|(born, ..)| *born).min().unwrap_or(event.at), joined_by)
            }
            Kind::Kill | Kind::Leave | Kind::Stop => {
                (event.at, last(false).ok_or("an event without a generation")?.0)
            }
        };
        let longest = |from: Duration, to: Duration| {
            let gaps = survivors.iter().flat_map(|log| gaps(log, from, to));
            (gaps.map(ms).fold(0.0, f64::max) - self.median_step).max(0.0)
        };
        let time_of = |step: u64| survivors.iter().filter_map(|log| log.time_of(step)).max();
        let to = time_of(to).ok_or("a generation without a step")?;
        self.gaps.push(longest(from, to));
        if let Some((step, record)) = switch {
            // The generation of a join is that of the two commits around it; that of another event
            // lasts until the joiner contributes.
            let after =
                time_of(step.saturating_sub(1)).filter(|_| kind == Kind::Join).unwrap_or(to);
            self.switches.push(longest(after, event.until));
            take_phases(&mut self.switch_phases, record);
        }
        if let Some((_, record)) = last(false).or(switch) {
            take_phases(&mut self.phases, record);
        }
        let quiet_from = event.at.saturating_sub(to.saturating_sub(from)).max(before);
        self.quiet.push(longest(quiet_from, event.at));
        Ok(())
    }
}

fn take_phases(phases: &mut Phases, record: &MembershipChange) {
    let ms = [
        record.detect_ms,
        record.agree_ms,
        record.connect_ms,
        record.state_ms,
        record.first_step_ms,
    ];
    phases.iter_mut().zip(ms).for_each(|(values, ms)| values.extend(ms));
}

/// Workers that were members before the event and after.
fn survivors<'a>(ended: &'a Ended, event: &Event) -> impl Iterator<Item = &'a EventLog> {
    let (at, until, victim) = (event.at, event.until, event.victim);
    let all = ended.logs.all.values().filter(move |log| Some(log.pid) != victim);
    all.filter(move |log| {
        log.contribution().is_some_and(|(first, _)| first < at)
            && log.commits.last().is_some_and(|(last, _)| *last >= until)
    })
}

/// Times between successive commits of this worker, where the later one lies after `from` and not
/// after `to`.
fn gaps(log: &EventLog, from: Duration, to: Duration) -> impl Iterator<Item = Duration> {
    let pairs = log.commits.windows(2);
    pairs.filter(move |pair| pair[1].0 > from && pair[1].0 <= to).map(|pair| pair[1].0 - pair[0].0)
}

/// Median time of a step while no event happens, in milliseconds.
fn median_step(ended: &Ended, events: &[Event]) -> f64 {
    let starts = std::iter::once(Duration::ZERO).chain(events.iter().map(|event| event.until));
    let ends = events.iter().map(|event| event.at);
    let quiet: Vec<(Duration, Duration)> = starts.zip(ends).collect();
    let mut steps = Vec::new();
    for log in ended.logs.all.values() {
        let Some((first, _)) = log.contribution() else { continue };
        for (from, to) in &quiet {
            steps.extend(gaps(log, first.max(*from), *to).map(ms));
        }
    }
    quantile(&mut steps, 0.5)
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
