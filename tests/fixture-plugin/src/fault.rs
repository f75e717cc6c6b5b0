//! What can be wrong with the fixture, each once.

/// A planted fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// Nothing is wrong.
    None,
    /// Every output is 1.01 times what it should be.
    Scaled,
    /// A bound form uses the weights of the first form of the same shape that has other ones: a layer with another
    /// layer's weights.
    Swapped,
    /// Only the first half of every output is written.
    Half,
    /// The third call of a bound form answers an error.
    ErrorThirdCall,
    /// The 300th call of a bound form answers an error: long after parity was judged.
    ErrorLate,
    /// Every call panics.
    PanicInCall,
    /// The third call of a bound form panics.
    PanicThirdCall,
    /// The ninth call of a bound form answers an error: it was bound by then.
    ErrorNinthCall,
    /// The ninth call of a bound form panics.
    PanicNinthCall,
    /// Every call does its work eleven times.
    Slow,
    /// One output value is NaN.
    NonFinite,
    /// Inputs that are all zero are served at once, every other one eleven times.
    FastOnZeros,
    /// Every call sleeps as soon as forms of two structures are in use: each alone is as good as any.
    SlowTogether,
    /// From the 40th call of a bound form on one output value is NaN.
    NonFiniteLate,
    /// From the 30th call of a bound form on every second call is declined.
    DeclinesOdd,
    /// Every call of a bound form after the 20th adds a little more to its outputs.
    Drifts,
    /// Every call changes the first value of its first input.
    WritesInput,
    /// Declares that it serves at most eight rows, and does: nothing is wrong with it, it is of no use for prompts.
    FewRows,
    /// Declares an architecture that this machine is not.
    WrongArch,
    /// Declares something that is no architecture.
    MalformedArch,
    /// Was built for another major of the plugin API.
    ApiMajor2,
    /// Was built for a later minor, and needs nothing of it.
    ApiMinorNewer,
    /// Requires a host feature that does not exist.
    Requires,
    /// `describe` panics.
    DescribePanics,
    /// `describe` never returns.
    DescribeHangs,
    /// `describe` ends the process by a signal.
    DescribeAborts,
    /// The document is not valid.
    BadDescribe,
    /// The document is another one after the scan.
    DescribeChanges,
    /// `open` answers an error.
    OpenFails,
    /// `open` ends the process by a signal.
    OpenAborts,
    /// `open` ends the process as if all were well.
    OpenExits,
    /// `open` never returns.
    OpenHangs,
    /// Dropping the instance ends the process by a signal.
    CloseAborts,
    /// Probes answer no.
    ProbeRefuses,
    /// Says that it takes packed rows of a checkpoint, before anybody else, and refuses them at bind.
    RefusesPacked,
    /// Prints on stdout while it is loaded and while it describes itself; otherwise good.
    Chatty,
    /// Loading it ends the process by a signal.
    LoadAborts,
    /// Loading it ends the process as if all were well.
    LoadExits,
    /// Loading it never returns.
    LoadHangs,
}

impl Fault {
    /// Every fault.
    pub const ALL: &'static [Fault] = &[
        Fault::None,
        Fault::Scaled,
        Fault::Swapped,
        Fault::Half,
        Fault::ErrorThirdCall,
        Fault::ErrorLate,
        Fault::PanicInCall,
        Fault::PanicThirdCall,
        Fault::ErrorNinthCall,
        Fault::PanicNinthCall,
        Fault::Slow,
        Fault::NonFinite,
        Fault::FastOnZeros,
        Fault::SlowTogether,
        Fault::NonFiniteLate,
        Fault::DeclinesOdd,
        Fault::Drifts,
        Fault::WritesInput,
        Fault::FewRows,
        Fault::WrongArch,
        Fault::MalformedArch,
        Fault::ApiMajor2,
        Fault::ApiMinorNewer,
        Fault::Requires,
        Fault::DescribePanics,
        Fault::DescribeHangs,
        Fault::DescribeAborts,
        Fault::BadDescribe,
        Fault::DescribeChanges,
        Fault::OpenFails,
        Fault::OpenAborts,
        Fault::OpenExits,
        Fault::OpenHangs,
        Fault::CloseAborts,
        Fault::ProbeRefuses,
        Fault::RefusesPacked,
        Fault::Chatty,
        Fault::LoadAborts,
        Fault::LoadExits,
        Fault::LoadHangs,
    ];

    /// Its name in a trailer.
    pub fn name(self) -> &'static str {
        match self {
            Fault::None => "none",
            Fault::Scaled => "scaled",
            Fault::Swapped => "swapped",
            Fault::Half => "half",
            Fault::ErrorThirdCall => "error_third_call",
            Fault::ErrorLate => "error_late",
            Fault::PanicInCall => "panic_in_call",
            Fault::PanicThirdCall => "panic_third_call",
            Fault::ErrorNinthCall => "error_ninth_call",
            Fault::PanicNinthCall => "panic_ninth_call",
            Fault::Slow => "slow",
            Fault::NonFinite => "non_finite",
            Fault::FastOnZeros => "fast_on_zeros",
            Fault::SlowTogether => "slow_together",
            Fault::NonFiniteLate => "non_finite_late",
            Fault::DeclinesOdd => "declines_odd",
            Fault::Drifts => "drifts",
            Fault::WritesInput => "writes_input",
            Fault::FewRows => "few_rows",
            Fault::WrongArch => "wrong_arch",
            Fault::MalformedArch => "malformed_arch",
            Fault::ApiMajor2 => "api_major_2",
            Fault::ApiMinorNewer => "api_minor_newer",
            Fault::Requires => "requires",
            Fault::DescribePanics => "describe_panics",
            Fault::DescribeHangs => "describe_hangs",
            Fault::DescribeAborts => "describe_aborts",
            Fault::BadDescribe => "bad_describe",
            Fault::DescribeChanges => "describe_changes",
            Fault::OpenFails => "open_fails",
            Fault::OpenAborts => "open_aborts",
            Fault::OpenExits => "open_exits",
            Fault::OpenHangs => "open_hangs",
            Fault::CloseAborts => "close_aborts",
            Fault::ProbeRefuses => "probe_refuses",
            Fault::RefusesPacked => "refuses_packed",
            Fault::Chatty => "chatty",
            Fault::LoadAborts => "load_aborts",
            Fault::LoadExits => "load_exits",
            Fault::LoadHangs => "load_hangs",
        }
    }

    /// The fault of this name.
    pub fn from_name(name: &str) -> Option<Fault> {
        Fault::ALL.iter().copied().find(|f| f.name() == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_read_back() {
        for fault in Fault::ALL {
            assert_eq!(Fault::from_name(fault.name()), Some(*fault));
        }
    }
}
