"""Dynamic sampling: a further group in place of each that does not count.

A group is lost where all its rewards are equal, or where failures drop it. Under
`uniform_groups='replace'` another one is opened for each, up to a bound.

Source: DAPO, arXiv 2503.14476, section 3.2.
Differs from it: DAPO samples whole batches more until enough groups survive and drops
the surplus; which groups are surplus is then a matter of who finished first. Here they
are replaced one for one, while the others still run.

Finishing order decides nothing. Groups are numbered; `first` of them begin together,
and each further one takes the next number. Let lost(n) be how many of the n
lowest-numbered groups come to be lost, which is a matter of their own members, and

    f(n) = first + min(bound, lost(n)).

f never falls, and rises by at most 1 from n to n + 1; so f(n) - n, at least 0 where
n = first, reaches 0 at some N and is above 0 before it.

No order opens more than N groups: while n <= N are open at most lost(n) of them have
been lost, and f(n) <= f(N) = N. No order stops at n < N: once their outcomes are in,
f(n) > n and another one opens. So the groups of a step follow from outcomes alone, and
with them the batch, which is the groups that are not lost: the `first` lowest-numbered
survivors, or all survivors of the first + bound groups there may be. No survivor is
left out.

Deadlines are the exception, since they make time an outcome: a group that the step's
own deadline costs is not replaced.
"""


def replacements(first: int, bound: int, lost: int, replaced: int) -> range:
    """Returns the numbers of the groups to open now.

    Args:
      first: Groups that the step begins with.
      bound: The most groups that may be opened beyond those.
      lost: Groups that closed and do not count, so far.
      replaced: Groups opened in their place, so far.
    """
    return range(first + replaced, first + min(bound, lost))
