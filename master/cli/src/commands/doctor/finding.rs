//! One result of a check.

/// What a check has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Finding {
    subject: &'static str,
    text: String,
    trouble: Option<Trouble>,
}

/// Why a finding is not good.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Trouble {
    prevents_jobs: bool,
    remedy: String,
}

impl Finding {
    pub(super) fn good(subject: &'static str, text: impl Into<String>) -> Self {
        Self { subject, text: text.into(), trouble: None }
    }

    /// A finding that prevents jobs.
    pub(super) fn problem(
        subject: &'static str,
        text: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let trouble = Some(Trouble { prevents_jobs: true, remedy: remedy.into() });
        Self { subject, text: text.into(), trouble }
    }

    /// A finding with which some jobs fail or are slow.
    pub(super) fn warning(
        subject: &'static str,
        text: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let trouble = Some(Trouble { prevents_jobs: false, remedy: remedy.into() });
        Self { subject, text: text.into(), trouble }
    }

    pub(super) fn prevents_jobs(&self) -> bool {
        self.trouble.as_ref().is_some_and(|trouble| trouble.prevents_jobs)
    }
}

/// The findings as lines, each with its remedy below it.
pub(super) fn to_table(findings: &[Finding]) -> String {
    let mut text = String::new();
    for Finding { subject, text: found, trouble } in findings {
        let verdict = match trouble {
            None => "ok",
            Some(Trouble { prevents_jobs: false, .. }) => "warning",
            Some(Trouble { prevents_jobs: true, .. }) => "problem",
        };
        text.push_str(&format!("{verdict:<8} {subject:<14} {found}\n"));
        if let Some(Trouble { remedy, .. }) = trouble {
            text.push_str(&format!("{:23} to do: {remedy}\n", ""));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_finding_has_its_remedy_below_it() {
        let findings = [
            Finding::good("processors", "4"),
            Finding::warning("open files", "at most 256", "ulimit -n 4096"),
            Finding::problem("cluster", "no answer", "check the network"),
        ];
        let expected = "\
ok       processors     4
warning  open files     at most 256
                        to do: ulimit -n 4096
problem  cluster        no answer
                        to do: check the network
";
        assert_eq!(to_table(&findings), expected);
        assert_eq!(findings.map(|finding| finding.prevents_jobs()), [false, false, true]);
    }
}
