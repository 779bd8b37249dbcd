//! The commands of `elasticdl`: a file for each, with its arguments.

mod checkpoint;
mod command_line;
mod delete;
mod evaluate;
mod list;
mod logs;
mod master;
mod predict;
mod scale;
mod start;
mod status;
mod stop;
mod train;
mod zoo;

pub use command_line::main;
#[cfg(test)]
use command_line::parse_start;
