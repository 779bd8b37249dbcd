//! Options for the handling of faults.

use clap::Args;
use elasticdl_master::job::OnNonfinite;

use super::values::{self, Choices};

/// Fault tolerance options of `elasticdl train`.
#[derive(Args, Debug)]
#[command(next_help_heading = "Fault tolerance")]
pub(crate) struct ResilienceOptions {
    /// Action if the gradient or loss of a step, summed over all workers, contains a NaN or an
    /// infinity.
    ///
    /// fail: the job ends before the step is applied, with exit code 1 and an error that names the
    /// step, the workers and their records. The state before the step is checkpointed and exported.
    /// skip: the step is skipped, and its records count as trained; the summary counts skipped
    /// steps. Checkpoints and exported models never contain a NaN or an infinity.
    #[arg(long, value_name = "WHAT", default_value = "fail",
          value_parser = values::choice(ON_NONFINITE))]
    pub(crate) on_nonfinite: OnNonfinite,

    /// Restart training from step 0 if all workers are lost and there is no checkpoint of their
    /// state.
    ///
    /// Without this option the job fails in that case and reports the lost steps. If there are
    /// checkpoints, training always resumes from the newest one. Until the first checkpoint is due,
    /// training always starts again: no more than one interval of --checkpoint-every is repeated.
    /// For a job without checkpoints this applies to the first five minutes.
    #[arg(long)]
    pub(crate) restart_without_checkpoint: bool,

    /// Let workers of different builds train together.
    ///
    /// Without this option a worker is excluded if its executable, its Python sources, its version
    /// of elasticdl, its tensors or its optimizer settings differ from those of the group, for
    /// example because an image tag has moved. This counts as a failure of the worker. Python
    /// sources are the main file and the modules in its folder that the program has imported. Use
    /// this option if machines of different architectures need different executables.
    #[arg(long)]
    pub(crate) allow_mixed_builds: bool,

    /// Number of workers beyond --num-workers that take the place of workers that are lost.
    ///
    /// A spare has loaded the program and follows the state of the group, and computes nothing:
    /// with N spares, up to N workers that are lost at once are made up for in milliseconds,
    /// however long a worker takes to start and to receive the state. What is lost then starts
    /// again as a spare. There may be at most twice --max-workers. Each of them needs what a worker
    /// needs, and receives each step's sum. With tables or --shard-optimizer, spares hold no part
    /// of the rows or of the optimizer's state before they join, so no more workers may be lost at
    /// once than without them. A spare that is silent or has stopped to follow takes no place, and
    /// is replaced: after --worker-timeout if a worker is missing, otherwise after 10 s, as it
    /// often comes back before another one has started, and after --step-timeout if it only sends
    /// heartbeats.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) spares: u32,

    /// Have this share of the steps computed twice, by different workers, and compared bit for bit:
    /// `1%`, or `0.0001%` to `100%`, with the percent sign.
    ///
    /// In such a step each worker also computes the part of another one, of another host if there
    /// are several, so 1% costs about 1% of the time. If two results differ, the step is not
    /// applied, all workers compute these records again, and the worker that is alone with its
    /// result is replaced, on another node if possible: its memory or processor has a fault. The
    /// step is then computed again. It is summed twice, too, and links have digests. With two
    /// workers that stand by their results, none is trusted, and the job goes back to the newest
    /// checkpoint. A model that is not deterministic is refused; so are models on GPUs and models
    /// with tables. The loop of a PyTorch program yields the batches of the other part, too.
    /// [default: no step]
    #[arg(long, value_name = "PERCENT", value_parser = parse_audit)]
    pub(crate) audit: Option<u32>,
}

/// Parses a share in percent, as parts per million.
fn parse_audit(text: &str) -> Result<u32, String> {
    let number = text.strip_suffix('%');
    if number.is_none() && text.parse::<f64>().is_ok() {
        return Err(format!("the percent sign is missing: `{text}%` is {text} of 100 steps"));
    }
    let percent = number.and_then(|number| number.parse::<f64>().ok());
    let millionths = percent.map(|percent| percent * 10_000.0);
    let is_whole = |m: &f64| (1.0..=1_000_000.0).contains(m) && (m - m.round()).abs() < 1e-6;
    millionths.filter(is_whole).map(|millionths| millionths.round() as u32).ok_or_else(|| {
        "it must be a share of the steps from 0.0001% to 100%, for example `1%`".to_owned()
    })
}

/// Values of `--on-nonfinite`.
const ON_NONFINITE: Choices<OnNonfinite> = &[
    ("fail", OnNonfinite::Fail, "The job fails before the step is applied"),
    ("skip", OnNonfinite::Skip, "The step is skipped, and its records count as trained"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_audit_is_a_share_in_percent() {
        for (text, millionths) in
            [("1%", 10_000), ("0.5%", 5000), ("0.0001%", 1), ("100%", 1_000_000)]
        {
            assert_eq!(parse_audit(text), Ok(millionths), "{text}");
        }
        // A share of 1 or 0.5 could mean all of the steps, or half of them.
        for bad in ["0", "0.5", "1"] {
            assert!(parse_audit(bad).unwrap_err().contains(&format!("`{bad}%`")), "{bad}");
        }
        for bad in ["", "%", "0%", "101%", "-1%", "0.00001%", "1.00001%", "NaN%", "one", "1%%"] {
            assert!(parse_audit(bad).unwrap_err().contains("for example `1%`"), "{bad}");
        }
    }
}
