//! Buffers of the training state on the host.

use std::fmt::Debug;
use std::ops::Deref;
use std::sync::Arc;

/// Memory that a program owns, and that the trainer keeps a part of the state in.
///
/// It stays at its address, so the program refers to it without copies.
pub trait ProgramMemory: Debug + Send + 'static {
    /// The memory.
    fn floats(&self) -> &[f32];

    /// The memory, to be written.
    fn floats_mut(&mut self) -> &mut [f32];
}

/// The memory of a program for its model's state.
#[derive(Debug)]
pub struct StateMemory {
    /// `[parameters]`.
    pub parameters: Box<dyn ProgramMemory>,
    /// Optimizer state.
    pub slots: Box<dyn ProgramMemory>,
}

/// The parameters or the optimizer state.
#[derive(Debug)]
pub(crate) struct StateBuffer {
    memory: Memory,
    /// Number of times that the buffer was given out for writing.
    version: u64,
}

#[derive(Debug)]
enum Memory {
    /// Joining workers are sent copies of it, which share it until it is written.
    Own(Arc<Vec<f32>>),
    /// Joining workers are sent copies that are made at once: the memory can't be replaced.
    Program(Box<dyn ProgramMemory>),
}

impl StateBuffer {
    /// `len` zeros, in memory whose pages are allocated.
    pub(crate) fn zeros(len: usize) -> Self {
        Self { memory: Memory::Own(Arc::new(zeros(len))), version: 0 }
    }

    /// The memory of a program.
    pub(crate) fn of_program(memory: Box<dyn ProgramMemory>) -> Self {
        Self { memory: Memory::Program(memory), version: 0 }
    }

    /// A number that changes whenever the values may have changed.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// The present values, whatever is written later.
    pub(crate) fn snapshot(&self) -> Arc<Vec<f32>> {
        match &self.memory {
            Memory::Own(shared) => Arc::clone(shared),
            Memory::Program(memory) => Arc::new(copied(memory.floats())),
        }
    }

    /// Starts to copy the present values to `memory` of this length.
    pub(crate) fn copy_to(&self, mut memory: Vec<f32>) -> Copying {
        match &self.memory {
            Memory::Own(shared) => Copying::Later { from: Arc::clone(shared), to: memory },
            Memory::Program(floats) => {
                memory.copy_from_slice(floats.floats());
                Copying::Done(memory)
            }
        }
    }

    /// The buffer for writing: a fresh copy, if the buffer is still being sent.
    pub(crate) fn writable(&mut self) -> &mut [f32] {
        self.version += 1;
        match &mut self.memory {
            Memory::Own(shared) => writable(shared),
            Memory::Program(memory) => memory.floats_mut(),
        }
    }
}

impl Deref for StateBuffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match &self.memory {
            Memory::Own(shared) => shared,
            Memory::Program(memory) => memory.floats(),
        }
    }
}

/// A copy of a buffer, which another thread may make before the trainer writes to the buffer.
#[derive(Debug)]
pub(crate) enum Copying {
    /// The lengths are equal.
    Later {
        from: Arc<Vec<f32>>,
        to: Vec<f32>,
    },
    Done(Vec<f32>),
}

impl Copying {
    /// The copy. Returns the buffer to the trainer.
    pub(crate) fn finish(self) -> Vec<f32> {
        match self {
            Self::Later { from, mut to } => {
                to.copy_from_slice(&from);
                to
            }
            Self::Done(copy) => copy,
        }
    }
}

/// A shared buffer for writing (copy-on-write): a fresh copy, if the buffer is still being sent.
pub(crate) fn writable(shared: &mut Arc<Vec<f32>>) -> &mut [f32] {
    if Arc::get_mut(shared).is_none() {
        *shared = Arc::new(copied(shared));
    }
    Arc::get_mut(shared).expect("this is the only reference, and there are no weak ones")
}

/// A copy, on huge pages where the system has them.
fn copied(floats: &[f32]) -> Vec<f32> {
    let mut copy = elasticdl_collective::zeros(floats.len());
    copy.copy_from_slice(floats);
    copy
}

/// `len` zeros, in memory whose pages are allocated.
#[must_use]
pub fn zeros(len: usize) -> Vec<f32> {
    let mut zeros = elasticdl_collective::zeros(len);
    // The system allocates zeroed memory lazily. A write that the compiler cannot remove forces the
    // allocation.
    zeros.iter_mut().step_by(PAGE_FLOATS).for_each(|first| *first = std::hint::black_box(0.0));
    zeros
}

/// Number of floats per page, for the smallest page size.
const PAGE_FLOATS: usize = 4096 / size_of::<f32>();

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Fixed(Vec<f32>);

    impl ProgramMemory for Fixed {
        fn floats(&self) -> &[f32] {
            &self.0
        }

        fn floats_mut(&mut self) -> &mut [f32] {
            &mut self.0
        }
    }

    #[test]
    fn a_snapshot_keeps_its_values_and_a_programs_memory_its_address() {
        let own = StateBuffer::zeros(3);
        let program = StateBuffer::of_program(Box::new(Fixed(vec![0.0; 3])));
        for (mut buffer, moves) in [(own, true), (program, false)] {
            let address = buffer.as_ptr();
            let snapshot = buffer.snapshot();
            let version = buffer.version();
            buffer.writable()[1] = 2.0;
            assert_eq!((&snapshot[..], &buffer[..]), (&[0.0; 3][..], &[0.0, 2.0, 0.0][..]));
            assert_eq!(buffer.as_ptr() != address, moves);
            assert_ne!(buffer.version(), version);
        }
    }
}
