//! Jobs of real processes with a sharded optimizer under random faults, of which one at a time
//! takes a worker away: is each record counted once, without a checkpoint?

use std::error::Error;

use elasticdl_tests::{JobFixture, Schedules};
use serde_json::{Value, json};

use crate::Arguments;

pub(crate) fn measure(arguments: &Arguments) -> Result<Value, Box<dyn Error>> {
    let schedules = Schedules {
        // The counts are in the optimizer's state, of three chunks. There is no checkpoint, and a
        // job that has lost a chunk fails.
        job: |programs| JobFixture {
            program_options: &["--slots"],
            parameters: 12_000,
            micros_per_record: 1000,
            restart_without_checkpoint: false,
            ..JobFixture::new(programs, 4)
        },
        flags: &["shard-optimizer"],
        one_loss_at_a_time: true,
        check: |summary, expected| {
            let counts = format!("{0} {0} {expected}", summary.epochs);
            if summary.model_summary.as_ref() != Some(&counts) {
                return Err(format!("counts {:?}, not {counts}", summary.model_summary));
            }
            match (&summary.rows_lost, &summary.state_lost) {
                (None, None) => Ok(()),
                lost => Err(format!("lost state: {lost:?}")),
            }
        },
    };
    let seeds = arguments.first_seed..arguments.first_seed + arguments.schedules;
    Ok(json!({ "schedules": schedules.run(seeds)? }))
}
