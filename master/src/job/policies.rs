//! The user's policies for the life of a job: what the exit code of a worker means, when the job
//! ends before its data, and who has to report its end.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::event::Exit;

/// The policies of a job; the default ones change nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policies {
    /// What the exit codes of workers mean; no code has two rules.
    #[serde(default)]
    pub on_exit: Vec<ExitRule>,
    /// Age at which the job stops with its newest state.
    #[serde(default)]
    pub deadline: Option<Duration>,
    /// Which members have to report the final state.
    #[serde(default)]
    pub success: SuccessPolicy,
    /// Whether no worker is started until the job is resumed.
    #[serde(default)]
    pub starts_suspended: bool,
    /// Whether the first `min_workers` workers are started together, because their scheduler places
    /// them together.
    #[serde(default)]
    pub starts_core_together: bool,
}

/// What exits with these codes mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitRule {
    /// The lowest code.
    pub first: u8,
    /// The highest code.
    pub last: u8,
    /// What follows.
    pub action: ExitAction,
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

/// Which members have to report the final state before the job is complete.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SuccessPolicy {
    /// All members; their states are compared.
    #[default]
    All,
    /// The lowest rank, which exports the model and writes the last checkpoint.
    LowestRank,
}

impl Policies {
    /// The rule for an exit of a worker that was not asked to end.
    ///
    /// A signal has the code that shells and containers give it: 128 and its number.
    pub(crate) fn rule_for(&self, exit: &Exit) -> Option<ExitRule> {
        let code = match exit {
            Exit::Code(code) => *code,
            Exit::Signal(signal) => signal.checked_add(SIGNALS)?,
            Exit::NotStarted(_) | Exit::OverLimit(_) | Exit::Reclaimed(_) | Exit::Unknown => {
                return None;
            }
        };
        let code = u8::try_from(code).ok()?;
        self.on_exit.iter().copied().find(|rule| (rule.first..=rule.last).contains(&code))
    }

    /// Checks that no code has two rules.
    ///
    /// # Errors
    /// The two rules.
    pub(crate) fn check(&self) -> Result<(), String> {
        for (i, rule) in self.on_exit.iter().enumerate() {
            let overlaps = |other: &&ExitRule| other.first <= rule.last && rule.first <= other.last;
            if let Some(other) = self.on_exit[..i].iter().find(overlaps) {
                let code = rule.first.max(other.first);
                return Err(format!(
                    "`{other}` and `{rule}` both say what code {code} means; each code may have \
                     one action"
                ));
            }
        }
        Ok(())
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
        let Self { first, last, action } = self;
        match first == last {
            true => write!(f, "{first}={}", action.name()),
            false => write!(f, "{first}-{last}={}", action.name()),
        }
    }
}

/// Parses `CODE=ACTION` or `FIRST-LAST=ACTION`.
impl FromStr for ExitRule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wanted = "it must be CODE=ACTION or FIRST-LAST=ACTION, with codes from 0 to 255 and \
                      one of the actions fail, ignore, restart and stop, for example `42=stop`";
        let (codes, action) = text.split_once('=').ok_or(wanted)?;
        let (first, last) = codes.split_once('-').unwrap_or((codes, codes));
        let code = |text: &str| {
            let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            text.parse::<u8>().ok().filter(|_| digits)
        };
        let (Some(first), Some(last)) = (code(first), code(last)) else {
            return Err(format!("`{codes}` is no exit code and no range of them; {wanted}"));
        };
        if first > last {
            return Err(format!("the range {codes} is empty; did you mean {last}-{first}?"));
        }
        let action = ExitAction::ALL.into_iter().find(|known| known.name() == action);
        let action = action.ok_or(wanted)?;
        let own = OWN_CODES.iter().find(|(code, _)| (first..=last).contains(code));
        match own {
            Some((code, what)) => Err(format!(
                "{code} is an exit code of the worker library ({what}), whose meaning is fixed; \
                 let the program exit with another code"
            )),
            None => Ok(Self { first, last, action }),
        }
    }
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
        for (text, rule) in [
            ("42=stop", ExitRule { first: 42, last: 42, action: ExitAction::Stop }),
            ("3-69=restart", ExitRule { first: 3, last: 69, action: ExitAction::Restart }),
            ("144-255=fail", ExitRule { first: 144, last: 255, action: ExitAction::Fail }),
            ("137=ignore", ExitRule { first: 137, last: 137, action: ExitAction::Ignore }),
        ] {
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
    fn a_code_has_one_rule() {
        assert_eq!(policies(&["3-9=stop", "10=fail", "11-69=ignore"]).check(), Ok(()));
        for rules in [["3-9=stop", "9=fail"], ["42=stop", "42=stop"], ["5=fail", "3-9=stop"]] {
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
            Exit::Reclaimed("preempted".into()),
            Exit::NotStarted("42".into()),
            Exit::Unknown,
        ] {
            assert_eq!(policies.rule_for(&other), None, "{other:?}");
        }
    }
}
