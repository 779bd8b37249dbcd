//! The jobs that are measured.

use std::error::Error;
use std::ffi::OsString;
use std::path::Path;

use clap::ValueEnum as _;
use elasticdl_tests::churn::DisturbedJob;
use elasticdl_tests::{Command, Network};

use crate::model::Rule;

/// A job of this program's model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    pub(crate) parameters: usize,
    pub(crate) rule: Rule,
    pub(crate) is_sharded: bool,
    /// Whether a sharded job has its parameters in bf16.
    pub(crate) is_half: bool,
    /// Milliseconds that a gradient takes at least.
    pub(crate) compute_ms: u64,
}

impl Job {
    /// A job with AdamW.
    pub(crate) fn new(parameters: usize, is_sharded: bool, compute_ms: u64) -> Self {
        Self { parameters, rule: Rule::Adamw, is_sharded, is_half: false, compute_ms }
    }

    /// The command, without data, of a job in `folder`, which may write event logs; on hosts of
    /// `network`, if there is one, of which the first is the master's.
    pub(crate) fn command(
        &self,
        folder: &Path,
        workers: u32,
        (network, event_logs): (Option<&Network>, Option<&Path>),
    ) -> Result<Command, Box<dyn Error>> {
        let this = std::env::current_exe()?;
        let mut program: Vec<OsString> = Vec::new();
        if let Some(network) = network {
            let script = network.on_the_launchs_host();
            program.extend(["/bin/sh", "-c", &script, "sh"].map(Into::into));
        }
        program.push(this.clone().into());
        program.extend(self.settings());
        let logs = event_logs.into_iter().flat_map(|logs| ["--event-logs".into(), logs.into()]);
        program.extend(logs);
        let mut command = Command::new(this, folder.join("job"), program)
            .flag("quiet")
            .option("checkpoint-dir", "none")
            .option("num-workers", workers.to_string())
            .option("global-batch-size", BATCH.to_string());
        if let Some(network) = network {
            command = command.started_by(network.on(0)).option("listen", network.address(0));
        }
        if self.is_half {
            command = command.option("param-dtype", "bf16");
        }
        Ok(if self.is_sharded { command.flag("shard-optimizer") } else { command })
    }

    /// The same job of four workers, to be disturbed.
    pub(crate) fn disturbed(&self) -> DisturbedJob {
        DisturbedJob {
            workers: 4,
            spares: 0,
            program: self.settings(),
            options: Vec::new(),
            flags: if self.is_sharded { vec!["shard-optimizer"] } else { Vec::new() },
            records: 4096,
            first_steps: REST_STEPS,
            rest_steps: if self.is_sharded { COPY_STEPS } else { REST_STEPS },
        }
    }

    /// Arguments of the worker's program.
    fn settings(&self) -> Vec<OsString> {
        let rule = self.rule.to_possible_value().map(|value| value.get_name().to_owned());
        let settings = [
            ("--parameters", self.parameters.to_string()),
            ("--optimizer", rule.expect("no optimizer is hidden")),
            ("--compute-ms", self.compute_ms.to_string()),
        ];
        settings.into_iter().flat_map(|(name, value)| [name.into(), value.into()]).collect()
    }
}

/// Records of a step: some for each worker.
pub(crate) const BATCH: u64 = 16;

/// Steps between two events.
const REST_STEPS: u64 = 8;

/// Steps in which four workers copy what one of them holds of a sharded optimizer's state, and then
/// its successor what it is to hold: half of the state each, 1/32 of the parameters' bytes, at
/// least, in a step.
const COPY_STEPS: u64 = 48;
