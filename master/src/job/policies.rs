//! The user's policies for the life of a job: what follows from the end of a worker, by its exit
//! code or by what has ended it; and when the job ends before its data.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::event::{Exit, ReclaimCause};

/// The policies of a job; the default ones change nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policies {
    /// What the ends of workers mean; no exit code and no event has two rules.
    pub on_exit: Vec<ExitRule>,
    /// Age at which the job stops with its newest state.
    pub deadline: Option<Duration>,
    /// How long programs may go on after the job is complete; `None`: a moment.
    pub end_timeout: Option<Duration>,
    /// Whether no worker is started until the job is resumed.
    pub starts_suspended: bool,
    /// Whether the first `min_workers` workers are started together, because their scheduler places
    /// them together.
    pub starts_core_together: bool,
    /// Whether all workers are started together, because nothing is lost if the data or the program
    /// is refused.
    #[serde(default)]
    pub starts_together: bool,
}

/// What follows from certain ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitRule {
    /// The ends that the rule is about.
    #[serde(flatten)]
    pub condition: ExitCondition,
    /// What follows.
    pub action: ExitAction,
}

/// The ends that a rule is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum ExitCondition {
    /// The program exited with a code in a range.
    Codes {
        /// The lowest code.
        first: u8,
        /// The highest code.
        last: u8,
    },
    /// The worker was ended by something else, or did not start.
    Event {
        /// What ended it.
        event: ExitEvent,
    },
}

/// What ends a worker whose program has not exited by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExitEvent {
    /// A user or a controller deleted its pod and gave no reason.
    Deleted,
    /// Its node was drained or tainted, or was short of a resource; or its queue withdrew it.
    Evicted,
    /// The cluster reports that its node is gone or silent.
    NodeLost,
    /// It could not be started.
    NotStarted,
    /// It exceeded its limit of memory or of disk space.
    OverLimit,
    /// A pod or workload of higher priority needed its capacity.
    Preempted,
    /// The master has evicted it because it did not respond.
    Unresponsive,
}

/// What follows from the end of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExitAction {
    /// The job fails.
    Fail,
    /// The worker is not replaced, if at least `min_workers` remain. This is no failure.
    Ignore,
    /// The worker is replaced. This is no failure.
    Restart,
    /// The job stops at the end of its step, with its newest state.
    Stop,
}

impl Policies {
    /// The rule for an exit.
    ///
    /// A signal has the code that shells and containers give it: 128 and its number.
    pub(crate) fn rule_for(&self, exit: &Exit) -> Option<ExitRule> {
        let code = match exit {
            Exit::Code(code) => *code,
            Exit::Signal(signal) => signal.checked_add(SIGNALS)?,
            Exit::NotStarted(_) => return self.rule_for_event(ExitEvent::NotStarted),
            Exit::OverLimit(_) => return self.rule_for_event(ExitEvent::OverLimit),
            Exit::Reclaimed { cause, .. } => return self.rule_for_event(ExitEvent::of(*cause)?),
            Exit::Unknown => return None,
        };
        let code = u8::try_from(code).ok()?;
        self.on_exit.iter().copied().find(|rule| match rule.condition {
            ExitCondition::Codes { first, last } => (first..=last).contains(&code),
            ExitCondition::Event { .. } => false,
        })
    }

    /// The rule for an event.
    pub(crate) fn rule_for_event(&self, event: ExitEvent) -> Option<ExitRule> {
        let condition = ExitCondition::Event { event };
        self.on_exit.iter().copied().find(|rule| rule.condition == condition)
    }

    /// Checks that no code and no event has two rules.
    ///
    /// # Errors
    /// The two rules.
    pub fn check(&self) -> Result<(), String> {
        for (i, rule) in self.on_exit.iter().enumerate() {
            for other in &self.on_exit[..i] {
                let Some(both) = rule.condition.intersection(other.condition) else { continue };
                return Err(format!(
                    "`{other}` and `{rule}` both say what {both} means; each code and each event \
                     may have one action"
                ));
            }
        }
        Ok(())
    }
}

impl ExitCondition {
    /// Whether such ends may be the program's or its configuration's fault, and may recur at once.
    pub(crate) fn is_own_fault(self) -> bool {
        match self {
            Self::Codes { .. } => true,
            Self::Event { event } => matches!(event, ExitEvent::NotStarted | ExitEvent::OverLimit),
        }
    }

    /// Names an end that both conditions are about.
    fn intersection(self, other: Self) -> Option<String> {
        match (self, other) {
            (Self::Codes { first, last }, Self::Codes { first: low, last: high }) => {
                (low <= last && first <= high).then(|| format!("code {}", first.max(low)))
            }
            (Self::Event { event }, Self::Event { event: other }) => {
                (event == other).then(|| format!("the event {}", event.name()))
            }
            _ => None,
        }
    }
}

impl ExitEvent {
    const ALL: [Self; 7] = [
        Self::Deleted,
        Self::Evicted,
        Self::NodeLost,
        Self::NotStarted,
        Self::OverLimit,
        Self::Preempted,
        Self::Unresponsive,
    ];

    /// The event by which a process was reclaimed; `None` if the master has withdrawn it.
    pub(crate) fn of(cause: ReclaimCause) -> Option<Self> {
        match cause {
            ReclaimCause::Deleted => Some(Self::Deleted),
            ReclaimCause::Evicted => Some(Self::Evicted),
            ReclaimCause::NodeLost => Some(Self::NodeLost),
            ReclaimCause::NotStarted => Some(Self::NotStarted),
            ReclaimCause::Preempted => Some(Self::Preempted),
            ReclaimCause::Unwanted => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Deleted => "deleted",
            Self::Evicted => "evicted",
            Self::NodeLost => "node-lost",
            Self::NotStarted => "not-started",
            Self::OverLimit => "over-limit",
            Self::Preempted => "preempted",
            Self::Unresponsive => "unresponsive",
        }
    }
}

impl ExitAction {
    const ALL: [Self; 4] = [Self::Fail, Self::Ignore, Self::Restart, Self::Stop];

    fn name(self) -> &'static str {
        match self {
            Self::Fail => "fail",
            Self::Ignore => "ignore",
            Self::Restart => "restart",
            Self::Stop => "stop",
        }
    }
}

impl fmt::Display for ExitRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.condition {
            ExitCondition::Codes { first, last } if first == last => write!(f, "{first}")?,
            ExitCondition::Codes { first, last } => write!(f, "{first}-{last}")?,
            ExitCondition::Event { event } => f.write_str(event.name())?,
        }
        write!(f, "={}", self.action.name())
    }
}

/// Parses `CODE=ACTION`, `FIRST-LAST=ACTION` or `EVENT=ACTION`.
impl FromStr for ExitRule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (ends, action) = text.split_once('=').ok_or_else(usage)?;
        let is_name = ends.starts_with(|c: char| c.is_ascii_alphabetic());
        let condition = if is_name { parse_event(ends)? } else { parse_codes(ends)? };
        let action = ExitAction::ALL.into_iter().find(|known| known.name() == action);
        Ok(Self { condition, action: action.ok_or_else(usage)? })
    }
}

fn parse_event(name: &str) -> Result<ExitCondition, String> {
    let event = ExitEvent::ALL.into_iter().find(|known| known.name() == name);
    let event = event.ok_or_else(|| format!("`{name}` is no event; {}", usage()))?;
    Ok(ExitCondition::Event { event })
}

fn parse_codes(codes: &str) -> Result<ExitCondition, String> {
    let (first, last) = codes.split_once('-').unwrap_or((codes, codes));
    let code = |text: &str| {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse::<u8>().ok().filter(|_| digits)
    };
    let (Some(first), Some(last)) = (code(first), code(last)) else {
        return Err(format!("`{codes}` is no exit code and no range of them; {}", usage()));
    };
    if first > last {
        return Err(format!("the range {codes} is empty; did you mean {last}-{first}?"));
    }
    match OWN_CODES.iter().find(|(code, _)| (first..=last).contains(code)) {
        Some((code, what)) => Err(format!(
            "{code} is an exit code of the worker library ({what}), whose meaning is fixed; let \
             the program exit with another code"
        )),
        None => Ok(ExitCondition::Codes { first, last }),
    }
}

/// What a rule may be.
fn usage() -> String {
    let events = ExitEvent::ALL.map(ExitEvent::name).join(", ");
    format!(
        "it must be CODE=ACTION, FIRST-LAST=ACTION or EVENT=ACTION, with codes from 0 to 255, one \
         of the events {events}, and one of the actions fail, ignore, restart and stop, for \
         example `42=stop` or `preempted=ignore`"
    )
}

/// What shells and containers add to the number of a signal.
const SIGNALS: i32 = 128;

/// The exit codes of the worker library, as `worker/src/environment.rs` has them.
const OWN_CODES: [(u8, &str); 5] = [
    (0, "the worker has left in order"),
    (1, "the model's code has failed, which the master knows by then"),
    (2, "the program was started in an invalid environment"),
    (70, "no master was found"),
    (143, "the worker was terminated, and not released in time"),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn policies(rules: &[&str]) -> Policies {
        let on_exit = rules.iter().map(|rule| rule.parse().unwrap()).collect();
        Policies { on_exit, ..Policies::default() }
    }

    #[test]
    fn a_rule_names_a_code_or_a_range_and_an_action() {
        for (text, first, last, action) in [
            ("42=stop", 42, 42, ExitAction::Stop),
            ("3-69=restart", 3, 69, ExitAction::Restart),
            ("144-255=fail", 144, 255, ExitAction::Fail),
            ("137=ignore", 137, 137, ExitAction::Ignore),
        ] {
            let rule = ExitRule { condition: ExitCondition::Codes { first, last }, action };
            assert_eq!(text.parse(), Ok(rule), "{text}");
            assert_eq!(rule.to_string(), text);
        }
        for (text, part) in [
            ("42", "CODE=ACTION"),
            ("42=retry", "fail, ignore, restart and stop"),
            ("256=stop", "0 to 255"),
            ("-1=stop", "0 to 255"),
            ("+4=stop", "0 to 255"),
            ("=stop", "0 to 255"),
            ("9-=stop", "0 to 255"),
            ("9-3=stop", "3-9"),
        ] {
            let error = text.parse::<ExitRule>().unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn a_rule_names_an_event_and_an_unknown_one_is_refused_with_the_known_ones() {
        for event in ExitEvent::ALL {
            let rule =
                ExitRule { condition: ExitCondition::Event { event }, action: ExitAction::Ignore };
            let text = rule.to_string();
            assert_eq!(text.parse(), Ok(rule), "{text}");
            assert_eq!(serde_json::to_value(event).unwrap(), event.name());
        }
        for text in ["evict=stop", "Preempted=stop", "node-lost-2=stop", "oom=fail"] {
            let error = text.parse::<ExitRule>().unwrap_err();
            let name = text.split_once('=').unwrap().0;
            let is_complete = ExitEvent::ALL.iter().all(|event| error.contains(event.name()));
            assert!(is_complete && error.contains(&format!("`{name}` is no event")), "{error}");
        }
    }

    #[test]
    fn the_codes_of_the_worker_library_have_a_fixed_meaning() {
        for (code, what) in OWN_CODES {
            for text in [format!("{code}=stop"), format!("{}-{code}=fail", code.min(1))] {
                let error = text.parse::<ExitRule>().unwrap_err();
                assert!(error.contains("of the worker library"), "{text}: {error}");
            }
            let error = format!("{code}=restart").parse::<ExitRule>().unwrap_err();
            assert!(error.contains(what), "{error}");
        }
    }

    #[test]
    fn a_code_or_event_has_one_rule() {
        let rules = ["3-9=stop", "10=fail", "evicted=fail", "11-69=ignore", "preempted=fail"];
        assert_eq!(policies(&rules).check(), Ok(()));
        for rules in [
            ["3-9=stop", "9=fail"],
            ["42=stop", "42=stop"],
            ["5=fail", "3-9=stop"],
            ["preempted=stop", "preempted=fail"],
        ] {
            let error = policies(&rules).check().unwrap_err();
            assert!(rules.iter().all(|rule| error.contains(rule)), "{error}");
        }
    }

    #[test]
    fn a_signal_has_the_code_of_shells_and_containers() {
        let policies = policies(&["42=stop", "137-139=fail"]);
        let action = |exit: Exit| policies.rule_for(&exit).map(|rule| rule.action);
        assert_eq!(action(Exit::Code(42)), Some(ExitAction::Stop));
        assert_eq!(action(Exit::Code(137)), Some(ExitAction::Fail));
        assert_eq!(action(Exit::Signal(9)), Some(ExitAction::Fail));
        assert_eq!(action(Exit::Signal(11)), Some(ExitAction::Fail));
        for other in [
            Exit::Code(41),
            Exit::Code(-214),
            Exit::Code(42 + 256),
            Exit::Signal(12),
            Exit::Signal(i32::MAX),
            Exit::OverLimit("memory".into()),
            Exit::reclaimed(ReclaimCause::Preempted, "preempted"),
            Exit::NotStarted("42".into()),
            Exit::Unknown,
        ] {
            assert_eq!(policies.rule_for(&other), None, "{other:?}");
        }
    }

    #[test]
    fn each_end_without_an_exit_code_has_its_event() {
        let rules = ExitEvent::ALL.map(|event| format!("{}=stop", event.name()));
        let policies = policies(&rules.each_ref().map(String::as_str));
        let reclaimed = |cause| Exit::reclaimed(cause, "it was reclaimed");
        for (exit, event) in [
            (reclaimed(ReclaimCause::Deleted), Some(ExitEvent::Deleted)),
            (reclaimed(ReclaimCause::Evicted), Some(ExitEvent::Evicted)),
            (reclaimed(ReclaimCause::NodeLost), Some(ExitEvent::NodeLost)),
            (reclaimed(ReclaimCause::NotStarted), Some(ExitEvent::NotStarted)),
            (reclaimed(ReclaimCause::Preempted), Some(ExitEvent::Preempted)),
            (reclaimed(ReclaimCause::Unwanted), None),
            (Exit::NotStarted("no such image".into()), Some(ExitEvent::NotStarted)),
            (Exit::OverLimit("memory".into()), Some(ExitEvent::OverLimit)),
            (Exit::Unknown, None),
            (Exit::Code(42), None),
        ] {
            let condition = policies.rule_for(&exit).map(|rule| rule.condition);
            assert_eq!(condition, event.map(|event| ExitCondition::Event { event }), "{exit:?}");
        }
    }
}
