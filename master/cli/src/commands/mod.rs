//! The commands of `elasticdl`: a file for each, with its arguments.

mod checkpoint;
mod command_line;
mod completions;
mod convert;
mod dashboard;
mod debug;
mod delete;
mod doctor;
mod evaluate;
mod host_process;
mod lineage;
mod list;
mod logs;
mod man;
mod master;
mod predict;
mod report;
mod scale;
mod start;
mod status;
mod stop;
mod suspend;
mod train;
mod zoo;

#[cfg(test)]
pub(super) use command_line::Cli;
pub use command_line::main;
#[cfg(test)]
use command_line::parse_start;
