//! The two helps of the commands that start a job: `--help` has the options that most jobs need,
//! `--help-all` has all of them, with details and examples.

use clap::{Arg, ArgAction, Args};

/// Options that print help, in place of those that clap adds to each command.
#[derive(Args, Debug)]
#[command(next_help_heading = None)]
pub(crate) struct HelpOptions {
    /// Print the options that most jobs need.
    #[arg(id = "help", long, short, action = ArgAction::HelpShort)]
    _help: Option<bool>,

    /// Print all options, with details and examples.
    #[arg(id = "help_all", long = "help-all", action = ArgAction::HelpLong)]
    _help_all: Option<bool>,
}

/// Leaves an option that few jobs need to `--help-all`.
pub(crate) fn usual_in_short_help(arg: Arg) -> Arg {
    let hidden = !arg.is_positional() && !USUAL.contains(&arg.get_id().as_str());
    arg.hide_short_help(hidden)
}

/// Ids of the options that `--help` has.
const USUAL: [&str; 36] = [
    "checkpoint_dir",
    "checkpoint_every",
    "_config",
    "data",
    "detach",
    "dry_run",
    "env",
    "env_from_secret",
    "evaluate_every",
    "export",
    "format",
    "global_batch_size",
    "help",
    "help_all",
    "image",
    "job_name",
    "local",
    "master_pod_template",
    "max_steps",
    "min_workers",
    "model",
    "namespace",
    "num_epochs",
    "num_workers",
    "predictions",
    "quiet",
    "replace",
    "resume",
    "resume_from",
    "seed",
    "tee",
    "training_data",
    "validation_data",
    "volume",
    "worker_pod_template",
    "worker_resources",
];

#[cfg(test)]
mod tests {
    use clap::{Command, CommandFactory as _};

    use super::*;
    use crate::commands::Cli;

    /// The commands that have two helps, as they are on a terminal of 80 columns.
    fn commands() -> Vec<Command> {
        let mut cli = Cli::command().term_width(80);
        cli.build();
        cli.get_subcommands().filter(|command| id(command, "help_all").is_some()).cloned().collect()
    }

    fn id<'a>(command: &'a Command, id: &str) -> Option<&'a Arg> {
        command.get_arguments().find(|arg| arg.get_id() == id)
    }

    #[test]
    fn the_help_of_each_command_that_starts_a_job_fits_two_screens() {
        let mut names = Vec::new();
        for mut command in commands() {
            let help = command.render_help().to_string();
            let lines = help.lines().count();
            assert!(lines <= 100, "{lines} lines: {help}");
            assert!(help.trim_end().ends_with(&format!("{} --help-all", command.get_name())));
            names.push(command.get_name().to_owned());
        }
        assert_eq!(names, ["evaluate", "predict", "train"]);
    }

    #[test]
    fn help_all_has_every_option_that_is_not_hidden() {
        for mut command in commands() {
            let help = command.render_long_help().to_string();
            for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
                let long =
                    arg.get_long().map_or_else(|| "PROGRAM".to_owned(), |long| format!("--{long}"));
                assert!(help.contains(&long), "no {long} in {help}");
            }
        }
    }

    #[test]
    fn each_usual_option_is_in_the_help_of_a_command() {
        let commands = commands();
        for usual in USUAL {
            let is_shown = |arg: &Arg| !arg.is_hide_set() && !arg.is_hide_short_help_set();
            assert!(
                commands.iter().any(|command| id(command, usual).is_some_and(is_shown)),
                "{usual}"
            );
        }
    }
}
